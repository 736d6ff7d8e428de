"""How each framework compiles, shards, optimises and steps a model; imported only where that framework runs."""
