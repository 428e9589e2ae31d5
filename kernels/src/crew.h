// The threads of one engine. A phase is a number of units of work that any of them may take, in any order; it ends when all are
// done, whoever did them: a thread that the operating system holds back delays nobody unless it holds a unit.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Crew {
  public:
    explicit Crew(int num_threads) {
        for (int index = 1; index < num_threads; ++index) threads_.emplace_back([this] { serve(); });
    }

    ~Crew() {
        stopping_.store(true);
        publish(nullptr, nullptr, 0);
        for (std::thread& thread : threads_) thread.join();
    }

    int num_threads() const { return int(threads_.size()) + 1; }

    // Calls body(unit) for every unit in [0, num_units), and returns when all calls have returned.
    template <class Body>
    void phase(int num_units, const Body& body) {
        if (threads_.empty() || num_units < 2) {
            for (int unit = 0; unit < num_units; ++unit) body(unit);
            return;
        }
        done_.store(0, std::memory_order_relaxed);
        publish([](const void* context, int unit) { (*static_cast<const Body*>(context))(unit); }, &body, num_units);
        work();
        for (int turns = 0; done_.load(std::memory_order_acquire) != num_units; ++turns) turns < SPINS ? relax() : void(sched_yield());
    }

  private:
    using Call = void (*)(const void*, int);
    static constexpr int SPINS = 4000;       // some tens of microseconds: phases follow each other closely within a step
    static constexpr uint64_t COUNT = 1 << 20;  // a ticket: phase | units of the phase | next unit, the lower two of 20 bits

    void publish(Call call, const void* context, int num_units) {
        call_ = call;
        context_ = context;
        const uint32_t phase = phase_.load(std::memory_order_relaxed) + 1;
        ticket_.store((uint64_t(phase) * COUNT + uint64_t(num_units)) * COUNT, std::memory_order_release);
        phase_.store(phase);
        if (num_asleep_.load() > 0) syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, int(threads_.size()), nullptr, nullptr, 0);
    }

    // Takes units until there are none. What call_ and context_ point to stays valid while a taken unit is not done.
    void work() {
        for (;;) {
            const uint64_t seen = ticket_.load(std::memory_order_relaxed);
            if (seen % COUNT >= seen / COUNT % COUNT) return;
            const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
            if (ticket % COUNT >= ticket / COUNT % COUNT) return;
            call_(context_, int(ticket % COUNT));
            done_.fetch_add(1, std::memory_order_release);
        }
    }

    void serve() {
        uint32_t seen = 0;
        for (;;) {
            for (int turns = 0; phase_.load(std::memory_order_acquire) == seen; ++turns) {
                if (turns < SPINS) {
                    relax();
                } else {
                    num_asleep_.fetch_add(1);
                    syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
                    num_asleep_.fetch_sub(1);
                }
            }
            seen = phase_.load(std::memory_order_acquire);
            if (stopping_.load()) return;
            work();
        }
    }

    std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::atomic<int> num_asleep_{0};
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<int> done_{0};
    Call call_ = nullptr;
    const void* context_ = nullptr;
    std::vector<std::thread> threads_;
};
