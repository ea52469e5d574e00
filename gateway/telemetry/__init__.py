"""Spans, metrics, decision records and logs."""
