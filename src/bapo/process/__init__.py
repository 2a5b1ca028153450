"""What a process of ours is to the machine around it: the signals it hears, the processes below it."""
