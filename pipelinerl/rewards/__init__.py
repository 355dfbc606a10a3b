"""The scorer process: rewards, environments and process reward models, each in processes that can be killed."""
