"""What `tandem doctor` looks at: one small module for each subject, each check run in a process of its own."""
