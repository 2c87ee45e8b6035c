"""Text, scores and tasks from a model that was trained."""
