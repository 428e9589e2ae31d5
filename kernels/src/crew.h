// The threads of one engine. A phase is a number of units of work that any of them may take, in any order; it ends when all are
// done, whoever did them: a thread that the operating system holds back delays nobody unless it holds a unit.
//
// Besides the threads on the process's own cores there may be one on each core that is lent to it. Such a thread works while the
// core's owner has nothing to do. It leaves after the unit that it is at when the owner says otherwise, sleeps, and comes back into
// whatever phase is on when the core is free again.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
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

// The cores lent to this process. In memory shared with their owners each core of the host has a word that is not 0 while its owner
// wants it, and one while a thread from here is at work on it: of the two at most one is left to go on.
struct Loan {
    std::vector<int> cpus;
    uint32_t *wanted = nullptr, *used = nullptr;

    bool is_free(int cpu) const { return __atomic_load_n(wanted + cpu, __ATOMIC_SEQ_CST) == 0; }
    bool has_free() const {
        return std::any_of(cpus.begin(), cpus.end(), [this](int cpu) { return is_free(cpu); });
    }
    void use(int cpu, bool is_used) const { __atomic_store_n(used + cpu, uint32_t(is_used), __ATOMIC_SEQ_CST); }

    // Sleeps while it is wanted, a tenth of a second at most.
    void wait(int cpu) const {
        const timespec most{0, 100'000'000};
        syscall(SYS_futex, wanted + cpu, FUTEX_WAIT, 1, &most, nullptr, 0);
    }
};

inline Loan loan;

// Every crew made from now on has a thread on each of these cores as well. The first array is copied, the others are kept.
extern "C" __attribute__((used)) inline void disagg_borrow(const int* cpus, int num_cpus, uint32_t* wanted, uint32_t* used) {
    loan = {{cpus, cpus + num_cpus}, wanted, used};
}

class Crew {
  public:
    explicit Crew(int num_threads) {
        for (int index = 1; index < num_threads; ++index) threads_.emplace_back([this] { serve(); });
        for (int cpu : loan.cpus) threads_.emplace_back([this, cpu] { serve_on(cpu); });
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
        while (take_unit()) {}
        for (int turns = 0; done_.load(std::memory_order_acquire) != num_units; ++turns) turns < SPINS ? relax() : void(sched_yield());
    }

  private:
    using Call = void (*)(const void*, int);
    static constexpr int SPINS = 4000;       // some tens of microseconds: phases follow each other closely within a step
    static constexpr uint64_t COUNT = 1 << 20;  // a ticket: phase | units of the phase | next unit, the lower two of 20 bits
    static constexpr uint32_t WAKE_OWN = 1, WAKE_LENT = 2;

    void publish(Call call, const void* context, int num_units) {
        call_ = call;
        context_ = context;
        const uint32_t phase = phase_.load(std::memory_order_relaxed) + 1;
        ticket_.store((uint64_t(phase) * COUNT + uint64_t(num_units)) * COUNT, std::memory_order_release);
        phase_.store(phase);
        uint32_t whom = own_asleep_.load() > 0 ? WAKE_OWN : 0;
        if (lent_asleep_.load() > 0 && (loan.has_free() || stopping_.load())) whom |= WAKE_LENT;
        if (whom != 0) syscall(SYS_futex, &phase_, FUTEX_WAKE_BITSET_PRIVATE, int(threads_.size()), nullptr, nullptr, whom);
    }

    // False: there are none. What call_ and context_ point to stays valid while a taken unit is not done.
    bool take_unit() {
        const uint64_t seen = ticket_.load(std::memory_order_relaxed);
        if (seen % COUNT >= seen / COUNT % COUNT) return false;
        const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
        if (ticket % COUNT >= ticket / COUNT % COUNT) return false;
        call_(context_, int(ticket % COUNT));
        done_.fetch_add(1, std::memory_order_release);
        return true;
    }

    void serve() {
        for (uint32_t seen = 0; !stopping_.load();) {
            wait_for_phase_after(seen, own_asleep_, WAKE_OWN, [] { return true; });
            seen = phase_.load(std::memory_order_acquire);
            while (take_unit()) {}
        }
    }

    void serve_on(int cpu) {
        stay_on(cpu);
        while (!stopping_.load()) {
            if (!loan.is_free(cpu)) {
                loan.wait(cpu);
                continue;
            }
            const uint32_t seen = phase_.load(std::memory_order_acquire);
            bool has_more = true;
            while (has_more && loan.is_free(cpu)) {
                loan.use(cpu, true);  // before looking again: the owner says that it wants the core, and then looks here
                has_more = loan.is_free(cpu) && take_unit();
                loan.use(cpu, false);
            }
            if (loan.is_free(cpu)) wait_for_phase_after(seen, lent_asleep_, WAKE_LENT, [cpu] { return loan.is_free(cpu); });
        }
    }

    // Spins for a while, as long as it may.
    template <class MaySpin>
    void wait_for_phase_after(uint32_t seen, std::atomic<int>& num_asleep, uint32_t mine, const MaySpin& may_spin) {
        for (int turns = 0; phase_.load(std::memory_order_acquire) == seen; ++turns) {
            if (turns < SPINS && may_spin()) {
                relax();
            } else {
                num_asleep.fetch_add(1);
                syscall(SYS_futex, &phase_, FUTEX_WAIT_BITSET_PRIVATE, seen, nullptr, nullptr, mine);
                num_asleep.fetch_sub(1);
            }
        }
    }

    // Where that is not allowed the thread is where the process's others are: slower, not wrong.
    static void stay_on(int cpu) {
        std::vector<unsigned long> mask(size_t(cpu) / (8 * sizeof(unsigned long)) + 1);
        mask.back() = 1UL << (size_t(cpu) % (8 * sizeof(unsigned long)));
        syscall(SYS_sched_setaffinity, 0, mask.size() * sizeof(unsigned long), mask.data());
    }

    std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::atomic<int> own_asleep_{0};
    std::atomic<int> lent_asleep_{0};
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<int> done_{0};
    Call call_ = nullptr;
    const void* context_ = nullptr;
    std::vector<std::thread> threads_;
};
