"""Floor 3: tokenize, pack, train, evaluate, analyze. Files in, files out; no cluster, no tracker."""
