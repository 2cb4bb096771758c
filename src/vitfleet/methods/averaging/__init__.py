"""FedAvg and its variants: every client trains the whole model, and the server averages what is sent."""
