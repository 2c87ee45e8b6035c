"""The processes of a run: how they meet, agree, notice that one is lost, and end together."""
