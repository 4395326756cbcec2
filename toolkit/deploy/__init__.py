"""The flows behind the commands: deploy, swap, rollback, and finding what is deployed here."""
