"""What both planes must agree on and neither owns: addresses, settings, errors, logs, transport."""
