"""What answers the policy between its turns: tools, games, and other environments.

episode.py         what every environment is to the rest: an answer to each turn, and the words for it
conversations.py   every response with its environment, turn after turn, and what happens when one fails
"""
