"""The page on ESG: tables, headlines and pictures of what `esg_experiments` found."""
