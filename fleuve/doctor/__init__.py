"""`fleuve doctor`: what of this machine, or of a cluster's nodes, would keep a run from going well."""
