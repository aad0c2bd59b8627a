"""The page on SAGE: tables, headlines and pictures of what `sage_experiments` found."""
