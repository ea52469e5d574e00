"""The gateway: an L7 proxy that sends each request where its first token will come soonest.

A request walks one way through these packages, each step a small object that the next one takes::

    bytes -> Request -> Prompt (token count, chain) -> Match -> Candidates -> Decision -> relay -> Outcome

* `gateway.http` knows sockets: it reads requests, writes answers, and moves bytes between the two.
* `gateway.prompt` turns a body into the exact token ids that the worker will prefill, and those into a chain of hashes.
* `gateway.prefix` knows which worker holds which prefix in which tier.
* `gateway.fleet` knows the workers: their state, their load, what they can do.
* `policies` (a package of its own) takes candidates and returns one of them.
* `backends` (a package of its own) knows each kind of worker's protocol.
* `gateway.telemetry` and `gateway.inspector` show what happened and why.

Nothing is built at import. `gateway.app` builds every part from one `Config`.
"""

__version__ = "0.1.0"
