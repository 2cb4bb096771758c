"""EFTViT: clients compute and send features, the server trains the rest of the model on them."""
