"""What a run leaves behind to be read: pictures, tables, a report."""
