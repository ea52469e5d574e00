"""From a request body to the exact token ids that the worker will prefill, and to their chain of block hashes."""
