"""Images: where they come from, how they are dealt to clients, and how a batch reaches the model."""
