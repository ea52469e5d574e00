"""The configuration: typed, strict, with line numbers in every complaint, and reloadable."""
