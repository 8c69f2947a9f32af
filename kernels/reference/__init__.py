"""The operations in plain NumPy: the specification every other kernel set is tested against."""
