"""Who may ask, and how much: bearer tokens, the limits of each, and the tenant it stands for."""
