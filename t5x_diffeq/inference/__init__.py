"""Text, scores and tasks from a trained model."""
