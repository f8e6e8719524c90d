"""What processes say to each other and write down: plain records, no behaviour."""
