"""Know before you pay: what a config needs and how fast it goes, before any rank is started."""
