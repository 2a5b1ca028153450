"""What answers the policy between its turns: tools, games, and other environments.

episode.py           what every environment is to the rest: an answer to each turn, and the words for it
conversations.py     every response with its environment, turn after turn, and what happens when one fails
script.py            how what is said becomes tokens of one model, by its chat template
shapes.py, calls.py  what users write: classes, functions, games of other libraries, and calls of tools in a turn
hosted.py            episodes in processes of their own; episode_process.py is the inside
"""
