"""What things cost, side by side with the engines themselves and with TorchRL: `make bench`."""
