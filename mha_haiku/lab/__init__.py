"""What heads do and which of them matter, and models of which that is known."""
