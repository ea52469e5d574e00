"""What keeps the process itself from collapsing: its loop, memory and file descriptors watched, and work refused before they are used up."""
