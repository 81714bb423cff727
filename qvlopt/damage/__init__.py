"""What quantisation did to tensors: for the self-checks of artifacts and for evaluate."""
