"""Policies: candidates in, one of them out.

A policy is a pipeline of filters, scorers and one picker (`policies.pipeline`), configured in YAML and built by an
explicit registry (`policies.registry`). It does no I/O, reads no clock and cannot leave the set of candidates it was
given, so the proxy in real time and the replay in virtual time run the very same objects.
"""
