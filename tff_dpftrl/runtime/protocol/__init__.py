"""What devices and server say to each other, and how each knows that the other may say it."""
