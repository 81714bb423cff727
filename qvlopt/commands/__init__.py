"""One module a command: from a loaded recipe to a result. `qvlopt.api` hands them on; nothing else calls them."""
