"""Server tests of other projects, run from a checkout against `keepwarm serve`."""
