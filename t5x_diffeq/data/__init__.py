"""From documents to batches that are a pure function of seed and step."""
