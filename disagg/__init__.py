"""Disaggregated LLM serving: prefill and decode in separate processes, the KV cache handed over, one command.

The map, in the order a request meets the modules.

Before any request:
    cli         arguments; ``chat`` is the conversation in a terminal, ``verify`` the proof that disaggregated output equals
                colocated output; ``doctor`` (with ``speed``) checks the host; ``status`` and ``top`` show a running server, which
                they ask through ``remote``; ``drain`` lets one finish what it has, or flips a worker; ``units`` makes it a
                systemd service
    settings    TOML, environment and flags become one frozen ``config``, with the origin of each value; secrets are read by
                ``credentials``
    serve       the composition root: builds every part below and runs them in one task group
    notify      what a service manager is told: ready, how it stands, that it lives
    log         structured lines on stderr, from the parent and the workers
    model       finds the model's files and reads what the parent needs of them
    deployment  which workers, with how much KV memory, how long a context; refused here or not at all
    cores       which cores each has to itself, and which it may use while their owner is idle
    supervisor  watches the workers and restarts them under a new epoch; ``launcher`` starts their processes
    worker      one engine on one device, its role a policy of its scheduler; ``worker_process`` is its process
    nodes       workers of other nodes, which ``node`` runs there and offers over a ``link``: a TCP ``session`` that both prove
    overdue     ends a worker that owes an answer and makes no progress with it
    pairs       which prefill worker can hand over to which decode worker; ``probe`` proves that bytes arrive, and how fast

A request, in the parent:
    api         HTTP: validates everything, answers with JSON or a stream of events
    text        renders the chat template and tokenises, once; later detokenises and cuts stop strings
    request     what was asked, and the table of states it passes
    grammar     what its answer may be, where it asks for a form: tried out by ``grammar_process``, then followed
                by the engine token by token
    router      admits it, walks it through its states, keeps its tokens in case a worker dies; ``routes`` chooses the workers
    operations  what an operator may do to the requests of a running server; ``flip`` changes what a worker does
    stream      its tokens on their way back to ``api``, its end, and the way to give it up
    messages    what crosses between parent and worker; ``channel`` carries it in frames over a socket

In the workers:
    decode      reserves blocks first, later continues from the second token on
    prefill     computes the prompt chunk by chunk, samples the first token, pushes finished blocks
    engine      the model, its scheduler, block pool, prefix cache and sampling; the only place with torch
    kernels     (the folder kernels/) what the engine runs where plain torch is too slow; ``native`` calls what src/ compiles to
    kv          the shape of a block, the fingerprint that peers compare, the digests of the prefix cache
    handoff     everything that moves a request's KV: protocol, plan, transports, digests

And all along:
    metrics     counters and histograms (``distribution``); ``vllm_metrics`` shows them by another server's names
    lifetime    where a request's time went: its stages, its line in the log, and with ``tracing`` its spans for a collector
    errors      what can go wrong, and whose fault it is
"""

from importlib.metadata import version

__version__ = version("disagg")
