"""The parts that every process needs: stages and channels, waits with deadlines, leases, addresses, plugins, findings."""
