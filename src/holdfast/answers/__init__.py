"""What every interface of a store answers with: the shapes of records, and problems."""
