"""What the simulator is held against: published cases (`published`), its speed (`fleet`), and live runs that it foretold (`blind`)."""
