"""The workers of each model: state, load, capabilities and health."""
