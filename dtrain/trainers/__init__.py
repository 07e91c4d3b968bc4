"""The built-in trainers. They run in workers, and only there is torch imported."""
