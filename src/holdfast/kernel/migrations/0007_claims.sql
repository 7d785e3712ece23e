-- hf_work.claim_id  names the claim that an item was last leased by, so that the claim's answer can
--                   be read again if it was lost with the connection. Only PostgreSQL needs it

--[both]
ALTER TABLE hf_work ADD COLUMN claim_id TEXT;
