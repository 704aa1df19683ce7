"""Methods, one folder each, all of one shape; ``catalog`` names them."""
