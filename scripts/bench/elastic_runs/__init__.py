"""What the bench of elastic roles runs on: prompts whose lengths change, models that score, live runs, and what their journals say."""
