"""Models to and from Hugging Face folders, and per-layer models into neural ODEs."""
