"""What every interface of a store returns: the shapes of records, and problems."""
