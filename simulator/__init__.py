"""A worker that behaves like a Neuron or GPU worker, and fleets of them in virtual time."""
