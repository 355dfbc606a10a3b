"""The decisions: plain classes without asyncio, clock or socket, driven alike by the live run and by the simulator."""
