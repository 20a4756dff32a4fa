"""What the ranks of the tests of ``rankcall.join`` run."""
