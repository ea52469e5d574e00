"""The admin listener: health, readiness, metrics, and the trace inspector."""
