"""What happens when a process dies: its work is issued again, what killed it twice is quarantined, and who comes back goes on."""
