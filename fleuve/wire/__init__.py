"""What every HTTP server of Fleuve has in common: who may talk to it, and which files a request may name."""
