"""What a peer may say: each rule names what cannot be about a message, before any of it becomes durable."""
