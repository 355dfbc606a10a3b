"""Games of other people's packages: what a warm start is taught, and a model that can read them."""
